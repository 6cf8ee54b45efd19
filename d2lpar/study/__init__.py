"""What chapter 18 still uses: ``methods``, and ``layers`` that are cut over ranks."""
