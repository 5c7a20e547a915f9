"""export(): writes a trained model, sharded or not, as a bundle."""
