"""The work of the apps, once their command line has been read."""
