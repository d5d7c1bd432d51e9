"""The coordinate check: do activations depend on the width of the model?"""
