from .stack import Stack as Stack
