"""Groups of several domains of equal size: what every engine does between them."""
