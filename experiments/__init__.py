"""Many runs: what is compared, how sure the differences are, and the tables that say so."""
