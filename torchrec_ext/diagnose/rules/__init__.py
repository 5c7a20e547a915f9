"""From facts to causes, remedies and answers: pure functions, which need no torch."""
