package doctor

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Schemes of a configSource.
const (
	schemeXDS = "xds"
	schemeK8S = "k8s"
)

// Bridge describes the listeners of a bridge that istiod may dial.
type Bridge struct {
	// Ports are those of its xDS listeners.
	Ports []string
	// TLS reports whether these refuse plaintext.
	TLS bool
	// Certificate is the certificate that they present, nil if it is not known.
	Certificate *x509.Certificate
	// ClientCertificate reports whether they refuse clients without one.
	ClientCertificate bool
	// Views reports whether some of them show a part of what is served.
	Views bool
	// Stubs reports whether ambient has the services by stubs in Kubernetes.
	Stubs bool
	// ClientAuthField is the field of the configuration that demands it.
	ClientAuthField string
}

// ReadCertificate returns the first certificate of a PEM file.
func ReadCertificate(file string) (*x509.Certificate, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, fmt.Errorf("%s: does not begin with a certificate in PEM", file)
	}
	return x509.ParseCertificate(block.Bytes)
}

// Mesh is a mesh configuration.
type Mesh struct {
	name    string
	line    int // added to the lines of the nodes
	sources []source
	proxy   map[string]string // defaultConfig.proxyMetadata
	root    *yaml.Node
}

// source is one of configSources.
type source struct {
	node    *yaml.Node
	address string
	scheme  string
	port    string
	tls     *tlsSettings
}

type tlsSettings struct {
	Mode            string   `yaml:"mode"`
	CA              string   `yaml:"caCertificates"`
	CredentialName  string   `yaml:"credentialName"`
	SNI             string   `yaml:"sni"`
	SubjectAltNames []string `yaml:"subjectAltNames"`
	Insecure        any      `yaml:"insecureSkipVerify"`
}

// ReadMesh reads a mesh configuration: as istiod takes it, as the ConfigMap
// that has it under the key mesh, or as the meshConfig of an IstioOperator or
// of Helm values. Name appears in findings.
func ReadMesh(name string, data []byte) (*Mesh, error) {
	m := &Mesh{name: name, proxy: map[string]string{}}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(doc.Content) == 0 || doc.Content[0].Kind != yaml.MappingNode {
		return nil, fmt.Errorf("%s: is not a mesh configuration: a YAML mapping is needed", name)
	}
	m.root = doc.Content[0]
	if text := at(m.root, "data", "mesh"); text != nil && text.Kind == yaml.ScalarNode {
		var inner yaml.Node
		if err := yaml.Unmarshal([]byte(text.Value), &inner); err != nil {
			return nil, fmt.Errorf("%s: data.mesh: %w", name, err)
		}
		if len(inner.Content) == 0 {
			return nil, fmt.Errorf("%s: data.mesh is empty", name)
		}
		m.root, m.line = inner.Content[0], text.Line
	} else if n := at(m.root, "spec", "meshConfig"); n != nil {
		m.root = n
	} else if n := at(m.root, "meshConfig"); n != nil {
		m.root = n
	}
	for _, n := range items(at(m.root, "configSources")) {
		var s struct {
			Address string       `yaml:"address"`
			TLS     *tlsSettings `yaml:"tlsSettings"`
		}
		if err := n.Decode(&s); err != nil {
			return nil, fmt.Errorf("%s: configSources: %w", m.position(n), err)
		}
		src := source{node: n, address: s.Address, tls: s.TLS}
		if u, err := url.Parse(s.Address); err == nil {
			src.scheme, src.port = u.Scheme, u.Port()
		}
		m.sources = append(m.sources, src)
	}
	if n := at(m.root, "defaultConfig", "proxyMetadata"); n != nil {
		if err := n.Decode(&m.proxy); err != nil {
			return nil, fmt.Errorf("%s: defaultConfig.proxyMetadata: %w", m.position(n), err)
		}
	}
	return m, nil
}

// at returns the node below the keys, nil if there is none.
func at(n *yaml.Node, keys ...string) *yaml.Node {
	for _, key := range keys {
		if n == nil || n.Kind != yaml.MappingNode {
			return nil
		}
		var next *yaml.Node
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				next = n.Content[i+1]
			}
		}
		n = next
	}
	return n
}

func items(n *yaml.Node) []*yaml.Node {
	if n == nil || n.Kind != yaml.SequenceNode {
		return nil
	}
	return n.Content
}

// position returns where a node is, for display.
func (m *Mesh) position(n *yaml.Node) string {
	if n == nil {
		n = m.root
	}
	return fmt.Sprintf("%s:%d:%d", m.name, m.line+n.Line, n.Column)
}

// Version is a version of Istio; the zero value is unknown.
type Version struct{ Minor int }

// ParseVersion returns the version in a text such as "1.26.2", the zero value
// if there is none.
func ParseVersion(text string) Version {
	major, rest, ok := strings.Cut(text, ".")
	minor, _, _ := strings.Cut(rest, ".")
	minor, _, _ = strings.Cut(minor, "-")
	n, err := strconv.Atoi(minor)
	if !ok || major != "1" || err != nil {
		return Version{}
	}
	return Version{n}
}

// firstTLS is the first version of Istio that dials a config source with TLS.
const firstTLS = 26

// Check returns what is wrong with the mesh configuration of an istiod that is
// to follow the bridge.
func (m *Mesh) Check(b Bridge, v Version) []Finding {
	var found []Finding
	add := func(check string, s Severity, n *yaml.Node, problem, change string) {
		found = append(found, Finding{Check: check, Severity: s, Subject: m.position(n), Problem: problem, Change: change})
	}
	list := at(m.root, "configSources")
	var ours []source
	for _, s := range m.sources {
		if s.scheme == schemeXDS && (s.port == "" || len(b.Ports) == 0 || slices.Contains(b.Ports, s.port)) {
			ours = append(ours, s)
		}
	}
	if len(ours) == 0 { // a Service may have another port than the listener
		for _, s := range m.sources {
			if s.scheme == schemeXDS {
				ours = append(ours, s)
			}
		}
	}
	if len(ours) == 0 {
		add("mesh-source", Failure, list, "configSources has no xds:// source, so istiod never asks the bridge for anything",
			"add what isthmus meshconfig prints to configSources")
	}
	kubernetes := slices.ContainsFunc(m.sources, func(s source) bool { return s.scheme == schemeK8S })
	if len(m.sources) > 0 && !kubernetes {
		add("mesh-k8s", Failure, list, "configSources has no k8s:// source: the list replaces the default, so istiod reads no VirtualService, Gateway or other Istio resource from Kubernetes",
			"configSources:\n- address: k8s://")
	}
	for _, s := range ours {
		m.checkTLS(s, b, v, add)
	}
	if len(ours) > 0 {
		m.checkProxies(b, add)
	}
	return found
}

type add = func(check string, s Severity, n *yaml.Node, problem, change string)

// checkTLS compares the TLS of a source with that of the bridge.
func (m *Mesh) checkTLS(s source, b Bridge, v Version, add add) {
	where := s.node
	if n := at(s.node, "tlsSettings"); n != nil {
		where = n
	}
	mode := ""
	if s.tls != nil {
		mode = s.tls.Mode
	}
	switch {
	case mode == "MUTUAL" || mode == "ISTIO_MUTUAL":
		add("mesh-tls-mode", Failure, where, fmt.Sprintf("mode %s is not implemented for config sources: istiod dials %s in plaintext silently", mode, s.address), "mode: SIMPLE")
		return
	case mode != "SIMPLE" && b.TLS:
		add("mesh-tls-missing", Failure, where, fmt.Sprintf("the bridge accepts TLS only, and istiod dials %s in plaintext", s.address), "tlsSettings as isthmus meshconfig prints them")
		return
	case mode != "SIMPLE":
		return
	case !b.TLS:
		add("mesh-tls-unwanted", Failure, where, "the listener of the bridge has no TLS, and istiod begins with a TLS handshake, which fails",
			"remove tlsSettings, or give listen.xds of the bridge tls: {cert_file: FILE, key_file: FILE}")
		return
	}
	if v.Minor > 0 && v.Minor < firstTLS {
		add("mesh-tls-version", Failure, where, fmt.Sprintf("istiod 1.%d ignores tlsSettings and dials in plaintext; TLS works from 1.%d on", v.Minor, firstTLS),
			"upgrade istiod, or remove tls from a listener of the bridge that only istiod reaches (allow: [{peer: {cidr: BLOCK}}])")
	} else if v.Minor == 0 {
		add("mesh-tls-version", Note, where, fmt.Sprintf("an istiod before 1.%d ignores tlsSettings and dials in plaintext; its version is not known", firstTLS), "")
	}
	if b.ClientCertificate {
		add("mesh-tls-client", Failure, where, "the bridge requires client certificates, and istiod presents none in any mode", b.ClientAuthField+": request")
	}
	m.checkAuthority(s, b, where, add)
}

// checkAuthority checks that istiod will trust the certificate of the bridge.
func (m *Mesh) checkAuthority(s source, b Bridge, where *yaml.Node, add add) {
	if skip, _ := s.tls.Insecure.(bool); skip || s.tls.CredentialName != "" {
		return
	}
	pool := x509.NewCertPool()
	if s.tls.CA != "" && !pool.AppendCertsFromPEM([]byte(s.tls.CA)) {
		add("mesh-tls-ca", Failure, where, "caCertificates has to be the text of certificates in PEM, not a path: with this istiod exits at its start",
			"caCertificates as isthmus meshconfig prints them")
		return
	}
	if b.Certificate == nil {
		return
	}
	if s.tls.CA != "" {
		// Names are compared below; an intermediate authority may be missing
		// here that the bridge sends.
		_, err := b.Certificate.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		if _, unknown := errors.AsType[x509.UnknownAuthorityError](err); unknown && !selfIn(b.Certificate, s.tls.CA) {
			add("mesh-tls-authority", Failure, where, "caCertificates did not sign the certificate of the bridge ("+b.Certificate.Subject.String()+")", "caCertificates as isthmus meshconfig prints them")
		}
	}
	names := b.Certificate.DNSNames
	name := s.tls.SNI
	if u, err := url.Parse(s.address); name == "" && err == nil {
		name = u.Hostname()
	}
	if name != "" && b.Certificate.VerifyHostname(name) != nil && net.ParseIP(name) == nil {
		add("mesh-tls-name", Failure, where, fmt.Sprintf("istiod expects the name %s, and the certificate of the bridge is for %s", name, strings.Join(names, ", ")), "sni: "+first(names))
	}
	if len(s.tls.SubjectAltNames) > 0 && !slices.ContainsFunc(s.tls.SubjectAltNames, func(n string) bool { return slices.Contains(names, n) }) {
		add("mesh-tls-name", Failure, where, fmt.Sprintf("none of subjectAltNames is a DNS name of the certificate of the bridge, which is for %s", strings.Join(names, ", ")), "subjectAltNames: ["+first(names)+"]")
	}
}

// selfIn reports whether the certificate itself is among those of the text.
func selfIn(c *x509.Certificate, text string) bool {
	for rest := []byte(text); ; {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return false
		}
		if slices.Equal(block.Bytes, c.Raw) {
			return true
		}
	}
}

func first(list []string) string {
	if len(list) == 0 {
		return "NAME"
	}
	return list[0]
}

// Metadata of proxies.
const (
	dnsCapture = "ISTIO_META_DNS_CAPTURE"
	hbone      = "ISTIO_META_ENABLE_HBONE" // set by Istio's installation with ambient
)

// checkProxies checks the defaults of proxies.
func (m *Mesh) checkProxies(b Bridge, add add) {
	where := at(m.root, "defaultConfig")
	if !strings.EqualFold(m.proxy[dnsCapture], "true") {
		add("mesh-dns-capture", Warning, where, "proxies do not capture DNS: a program resolves the hosts of the bridge only where another DNS server knows them, "+
			"and hosts that speak raw TCP on one port cannot be told apart without an address that only the proxy's DNS returns",
			"defaultConfig:\n  proxyMetadata:\n    "+dnsCapture+`: "true"`)
	}
	if strings.EqualFold(m.proxy[hbone], "true") && !b.Stubs {
		add("ambient", Warning, at(m.root, "defaultConfig", "proxyMetadata"), ambientProblem, ambientChange)
	}
}

// What ambient means for the services of any config source.
const (
	ambientProblem = "ambient is on: ztunnel and waypoints do not see the services of a config source; istiod reads those for ambient from Kubernetes only, from 1.22 on"
	ambientChange  = "consumers.kubernetes, with which the bridge writes a stub of each service (docs/ambient.md), or apply those that isthmus dump --for kubernetes prints, or run the clients of these services with sidecars (label the namespace istio-injection: enabled instead of istio.io/dataplane-mode: ambient)"
)
