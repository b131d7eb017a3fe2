"""What a step cost and where its time went."""
