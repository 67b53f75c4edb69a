"""What is publicly known of GPUs: their data sheets, and measured times of their collectives."""
