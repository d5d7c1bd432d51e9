"""Tools that look at jobs and runs; nothing that trains imports them."""
