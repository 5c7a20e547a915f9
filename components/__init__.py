"""TorchX components: `torchx run rec.train.hybrid`."""
