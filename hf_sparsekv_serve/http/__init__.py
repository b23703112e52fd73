"""An OpenAI-compatible server around an engine; needs the extra ``serve`` (fastapi, uvicorn, prometheus-client)."""

from .app import create_app

__all__ = ["create_app"]
