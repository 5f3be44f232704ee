from envbuild.cli.entry import main

main()
