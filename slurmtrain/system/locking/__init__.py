"""What locks are made of: who holds one, waiting for it, and what replaces the kernel's."""
