package consul

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// fields returns the fields that an error of Validate names, in order.
func fields(t *testing.T, err error) []string {
	t.Helper()
	if err == nil {
		return nil
	}
	var out []string
	for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
		f, ok := errors.AsType[*plugin.FieldError](e)
		if !ok || f.Reason == "" {
			t.Fatalf("%v is not a FieldError with a reason", e)
		}
		out = append(out, f.Field)
	}
	return out
}

// TestValidate shows that each wrong field is named, all of them at once.
func TestValidate(t *testing.T) {
	tests := map[string]struct {
		change func(*Config)
		want   []string
	}{
		"defaults":          {func(*Config) {}, nil},
		"host and port":     {func(c *Config) { c.Address = "consul.example.org:8500" }, nil},
		"socket":            {func(c *Config) { c.Address = "unix:///run/consul.sock" }, nil},
		"relative socket":   {func(c *Config) { c.Address = "unix://consul.sock" }, []string{"address"}},
		"no port number":    {func(c *Config) { c.Address = "127.0.0.1:99999" }, []string{"address"}},
		"port 0":            {func(c *Config) { c.Address = "http://127.0.0.1:0" }, []string{"address"}},
		"no colon":          {func(c *Config) { c.Address = "http//127.0.0.1:8500" }, []string{"address"}},
		"no host":           {func(c *Config) { c.Address = "http://:8500" }, []string{"address"}},
		"other scheme":      {func(c *Config) { c.Address = "tcp://x:1" }, []string{"address"}},
		"secret in address": {func(c *Config) { c.Address = "http://a:b@x:1" }, []string{"address"}},
		"scheme":            {func(c *Config) { c.Scheme = "ftp"; c.Address = "http://x" }, []string{"scheme"}},
		"two tokens":        {func(c *Config) { c.Token, c.TokenFile = "t", "/f" }, []string{"token_file"}},
		"tls without https": {func(c *Config) { c.TLS.InsecureSkipVerify = true }, []string{"tls"}},
		"tls":               {func(c *Config) { c.Address = "https://x"; c.TLS.CAFile = "/ca" }, nil},
		"tls by scheme":     {func(c *Config) { c.Address, c.Scheme = "x:8501", "https"; c.TLS.CAFile = "/ca" }, nil},
		"certificate alone": {func(c *Config) { c.Address = "https://x"; c.TLS.CertFile = "/c" }, []string{"tls.cert_file"}},
		"two authorities":   {func(c *Config) { c.Address = "https://x"; c.TLS.CAFile, c.TLS.CAPath = "/a", "/b" }, []string{"tls.ca_path"}},
		"token in plain":    {func(c *Config) { c.Address, c.Token = "http://consul.example.org:8500", "t" }, []string{"address"}},
		"file in plain":     {func(c *Config) { c.Mode, c.Address, c.TokenFile = "auto", "10.0.0.1", "/t" }, []string{"address"}},
		"in plain, said so": {func(c *Config) { c.Address, c.Token, c.Insecure = "http://consul.example.org:8500", "t", true }, nil},
		"over loopback":     {func(c *Config) { c.Address, c.Token = "http://[::1]:8500", "t" }, nil},
		"over localhost":    {func(c *Config) { c.Address, c.Token = "localhost:8500", "t" }, nil},
		"over a socket":     {func(c *Config) { c.Address, c.Token = "unix:///run/consul.sock", "t" }, nil},
		"over https":        {func(c *Config) { c.Address, c.Token = "https://consul.example.org", "t" }, nil},
		"addresses":         {func(c *Config) { c.Addresses = []string{"https://a", "https://b:1"} }, nil},
		"address twice":     {func(c *Config) { c.Address, c.Addresses = "https://c", []string{"https://a"} }, []string{"addresses"}},
		"addresses, odd": {func(c *Config) {
			c.Token, c.Addresses = "t", []string{"http://localhost", "https://a", "http://b", "http://localhost", "://"}
		}, []string{"addresses[1]", "addresses[2]", "addresses[3]", "addresses[4]"}},
		"addresses and tls": {func(c *Config) {
			c.Mode, c.TLS.CAFile, c.Addresses = "auto", "/ca", []string{"http://a", "http://b"}
		}, []string{"tls"}},
		"max_stale":   {func(c *Config) { c.MaxStale = 1 }, []string{"max_stale"}},
		"datacenters": {func(c *Config) { c.Datacenters = []string{"a", "", "a", "*"} }, []string{"datacenters[1]", "datacenters[2]", "datacenters[3]"}},
		"namespaces":  {func(c *Config) { c.Namespaces = []string{"a", "*"} }, []string{"namespaces[1]"}},
		"all of them": {func(c *Config) { c.Namespaces, c.Partitions = []string{"*"}, []string{"*"} }, nil},
		"partitions":  {func(c *Config) { c.Partition, c.Partitions = "a", []string{"*", "a"} }, []string{"partitions[0]", "partitions"}},
		"partition":   {func(c *Config) { c.Partition = "*" }, []string{"partition"}},
		"globs": {func(c *Config) {
			c.Services = plugin.Selection{Include: plugin.Globs{"a*", "[a"}, Exclude: plugin.Globs{""}}
			c.NodeMeta = plugin.Globs{"["}
		}, []string{"services.include[1]", "services.exclude[0]", "node_meta[0]"}},
		"kinds":                 {func(c *Config) { c.Kinds = []string{"typical", "proxy"} }, []string{"kinds[1]"}},
		"wait too short":        {func(c *Config) { c.Wait = plugin.Duration(time.Second) }, []string{"wait"}},
		"wait too long":         {func(c *Config) { c.Wait = plugin.Duration(time.Hour) }, []string{"wait"}},
		"few connections":       {func(c *Config) { c.MaxConnections = 15 }, []string{"max_connections"}},
		"least connections":     {func(c *Config) { c.MaxConnections = 16 }, nil},
		"too few for scopes":    {func(c *Config) { c.MaxConnections, c.Datacenters = 25, []string{"a", "b", "c"} }, []string{"max_connections"}},
		"enough for scopes":     {func(c *Config) { c.MaxConnections, c.Datacenters = 26, []string{"a", "b", "c"} }, nil},
		"few, and need no more": {func(c *Config) { c.Address, c.MaxConnections, c.Datacenters = "https://x", 16, []string{"a", "b"} }, nil},
		"mode":                  {func(c *Config) { c.Mode = "grpc" }, []string{"mode"}},
		"peering without mode":  {func(c *Config) { c.Peering.TokenFile = "/t" }, []string{"peering"}},
		"peering":               {func(c *Config) { c.Mode, c.Peering = "peering", PeeringConfig{"/t", "/s"} }, nil},
		"peering without files": {func(c *Config) { c.Mode = "peering" }, []string{"peering.token_file", "peering.secret_file"}},
		"one file for both":     {func(c *Config) { c.Mode, c.Peering = "peering", PeeringConfig{"/t", "/t"} }, []string{"peering.secret_file"}},
		"peers":                 {func(c *Config) { c.Peers = []string{"a", "b"} }, nil},
		"peers, odd":            {func(c *Config) { c.Peers = []string{"a", "a", "*", ""} }, []string{"peers[1]", "peers[2]", "peers[3]"}},
		"peers of namespaces":   {func(c *Config) { c.Peers, c.Namespaces = []string{"a"}, []string{"n"} }, []string{"peers"}},
		"connect":               {func(c *Config) { c.Connect = true }, nil},
		"connect of peers":      {func(c *Config) { c.Connect, c.Peers = true, []string{"a"} }, []string{"connect"}},
		"connect and kinds":     {func(c *Config) { c.Connect, c.Kinds = true, []string{"connect-proxy"} }, []string{"kinds"}},
		"peering and queries": {func(c *Config) {
			c.Mode, c.Peering = "peering", PeeringConfig{"/t", "/s"}
			c.Address, c.Token, c.Filter, c.Kinds, c.TLS.CAFile, c.Peers = "https://h", "t", "a == b", []string{"mesh-gateway"}, "/c", []string{"p"}
		}, []string{"address", "token", "tls", "peers", "filter", "kinds"}},
		"several things": {func(c *Config) { c.Scheme = "x"; c.Address = "http://"; c.Kinds = []string{"x"} }, []string{"scheme", "address", "kinds[0]"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got := fields(t, config(test.change).Validate()); !slices.Equal(got, test.want) {
				t.Errorf("fields %q, want %q", got, test.want)
			}
		})
	}
}

// TestParseAddress shows what becomes of the ways to write an address.
func TestParseAddress(t *testing.T) {
	for address, want := range map[string]target{
		"http://h:1":             {scheme: "http", host: "h:1"},
		"https://h":              {scheme: "https", host: "h:8501"},
		"h":                      {scheme: "http", host: "h:8500"},
		"h:1":                    {scheme: "http", host: "h:1"},
		"http://[::1]:8500/a/b/": {scheme: "http", host: "[::1]:8500", prefix: "/a/b"},
		"http://[::1]":           {scheme: "http", host: "[::1]:8500"},
		"unix:///run/c.sock":     {scheme: "http", host: "localhost", socket: "/run/c.sock"},
	} {
		if got, err := parseAddress(address, ""); err != nil || got != want {
			t.Errorf("%s: %+v, %v; want %+v", address, got, err, want)
		}
	}
}

// FuzzParseAddress shows that no address makes parsing panic, and that an
// accepted one names a host.
func FuzzParseAddress(f *testing.F) {
	for _, seed := range []string{"http://h:1", "h", "unix:///a", "https://[::1]/p", "://", ""} {
		f.Add(seed, "http")
	}
	f.Fuzz(func(t *testing.T, address, scheme string) {
		if got, err := parseAddress(address, scheme); err == nil && got.host == "" {
			t.Errorf("%q: accepted without a host: %+v", address, got)
		}
	})
}
