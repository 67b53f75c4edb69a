"""Public figures of GPUs: their data sheets, and measured times of their collectives."""
