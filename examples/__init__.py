"""Programs that show loka_compile at work; nothing in the package depends on them."""
