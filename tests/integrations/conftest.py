"""Importing transformers and timm must work before any test does it."""

from tests.integrations import vision_schemas  # noqa: F401
