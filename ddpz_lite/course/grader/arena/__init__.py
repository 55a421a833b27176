"""Where answers run: ranks that reach each other through a broker alone."""
