"""Pictures and pages of HTML that state their conclusion."""
