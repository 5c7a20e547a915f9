"""export(): from a trained model, sharded or not, to a bundle."""
