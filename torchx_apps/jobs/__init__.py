"""What the apps do once their command line is read."""
