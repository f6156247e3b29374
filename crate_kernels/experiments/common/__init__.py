"""What the verbs that train, measure and draw have in common."""
