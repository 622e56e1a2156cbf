"""The command line of Range."""
