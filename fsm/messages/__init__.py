"""What actors say to each other, and the records that it is said with: steps, parameters, outputs, errors."""
