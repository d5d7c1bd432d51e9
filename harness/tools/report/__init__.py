"""Tables and plots of measured runs, with published and predicted results beside them."""
