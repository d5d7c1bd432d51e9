"""Train a job under techniques and compare their loss curves with a control's. Imports no torch."""
