"""The mains that the components launch."""
