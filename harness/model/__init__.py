"""Parts of a decoder, and the specification of its tensors."""
