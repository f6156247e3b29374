"""Shared parts of the subcommands that train, measure and draw."""
