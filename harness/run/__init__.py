"""Files of a run folder: paths, locks, status, errors, evaluations. Imports no torch."""
