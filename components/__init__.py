"""TorchX components: plain functions from flags to a job, such as `rec.train.hybrid`.

TorchX executes each file on its own, so a file imports torchx and typing, and an app only inside of a function.
"""
