"""Conversion of pool elements to operands, and the columns of sections."""
