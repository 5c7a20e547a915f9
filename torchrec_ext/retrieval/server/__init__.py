"""HTTP server of a bundle: Starlette, msgspec and uvicorn; it imports no torch."""
