"""The typed job: its groups, their fields and rules, and the registries of names. Imports no torch."""
