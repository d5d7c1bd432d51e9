"""Modules of a decoder, and one description of every tensor. They know no layout and no planner."""
