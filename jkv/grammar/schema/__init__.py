"""JSON schemas as languages (https://json-schema.org/draft/2020-12)."""
