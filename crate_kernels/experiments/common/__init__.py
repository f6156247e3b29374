"""Shared parts of the verbs that train, measure and draw."""
