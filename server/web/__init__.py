"""HTTP layer between uvicorn and the routes: access checks, request bodies and replies."""
