"""Bundle: a folder with all that answers for a trained model, and the proof that it is that model."""
