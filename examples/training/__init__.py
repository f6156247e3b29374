"""What the training examples share: processes, cutting a model over them, checkpoints, figures, the loop."""
