"""Scripts for those who work on this project; the service imports none of them."""
