"""Bundle: a folder with all that serves a trained model, and the proof that it is that model."""
