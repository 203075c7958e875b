// Command coredns is CoreDNS with the plugins that tests use.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/file"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/template"
	_ "github.com/coredns/coredns/plugin/tls"
)

func main() {
	dnsserver.Directives = []string{"tls", "bind", "log", "template", "file"}
	coremain.Run()
}
