// Command isthmus is the bridge from service registries to an Istio mesh.
//
//	isthmus serve --config FILE      follow registries, serve what they hold
//	isthmus demo                     the same for a generated registry, with its changes in the terminal
//	isthmus watch --address ADDRESS  print what a bridge, or any such xDS server, sends
//	isthmus dump --config FILE       print what would be served, as YAML for kubectl
//	isthmus validate --config FILE   check a configuration
//	isthmus adapter NAME             a built-in adapter as plugin; the bridge starts it
//	isthmus plugin check PATH        check that an executable keeps the contract of adapters
//	isthmus docs                     print the reference of the configuration, or a schema of it
//	isthmus version
//
// Exit codes:
//
//	0  done, or ended by SIGINT or SIGTERM
//	1  something failed at run time
//	2  the command line is wrong
//	3  the configuration is wrong
//	4  an address cannot be listened on
//	5  the registries did not list what they hold in time
package main

//go:generate go run . docs --dir ../../docs/reference
//go:generate sh -c "cd ../.. && go run ./internal/pages"
//go:generate sh -c "go run . docs --schema > ../../docs/configuration.schema.json"
