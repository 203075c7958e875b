module github.com/isthmus-mesh/isthmus/tools/http-echo

go 1.26.7

tool github.com/hashicorp/http-echo

require github.com/hashicorp/http-echo v1.0.0 // indirect
