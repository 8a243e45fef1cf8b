from tinylm.cli import main

main()
