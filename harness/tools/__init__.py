"""Look at jobs and runs: plan, rehearse, parity, report and more. Nothing that trains imports them."""
