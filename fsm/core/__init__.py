"""What all machines share: tables, transitions and effects, guards, and how long a state may last."""
