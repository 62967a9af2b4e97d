"""What commands share: options, output, tables, progress."""
