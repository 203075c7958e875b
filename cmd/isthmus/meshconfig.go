package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/isthmus-mesh/isthmus/internal/doctor"
	"github.com/isthmus-mesh/isthmus/server/config"
)

func newMeshConfig() *cobra.Command {
	var host, ca string
	var instances int
	cmd := &cobra.Command{
		Use:   "meshconfig --config FILE",
		Short: "Print the configSources that make istiod follow the bridge",
		Long: `Print the part of istiod's mesh configuration that makes it follow the bridge: k8s:// first, without which istiod reads no Istio resources from
Kubernetes, and the xDS listener with its TLS, or several of them if their views divide what is served. istiod reads this only at its start.

Put it into meshConfig of an IstioOperator or of Helm values, or into the key mesh of the ConfigMap istio in istio-system. If a listener is on
all addresses, --host says which name istiod connects to; the address of a loopback listener is printed as it is.

With TLS the mode is SIMPLE, which needs Istio 1.26: earlier versions, and all other modes, connect in plaintext.`,
		Example: `  isthmus meshconfig --config isthmus.yaml --host isthmus.isthmus-system.svc --ca-file ca.pem`,
		Args:    usageArgs(cobra.NoArgs),
	}
	file := requireConfig(cmd)
	cmd.Flags().StringVar(&host, "host", "", "`NAME` by which istiod reaches the bridge, such as that of its Service")
	cmd.Flags().StringVar(&ca, "ca-file", "", "PEM `FILE` of the authority of the listener's certificate (default: the certificate itself, if it is its own authority)")
	cmd.Flags().IntVar(&instances, "instances", 0, "`NUMBER` of instances in all registries, to propose a number of shards")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if instances < 0 {
			return usageError(cmd, fmt.Errorf("--instances %d: must not be below 0", instances))
		}
		ctx, stop := endAtHangup(cmd.Context())
		defer stop()
		cfg, err := loadConfig(ctx, *file, config.Log{Level: "warn"}.Logger(cmd.ErrOrStderr()))
		if err != nil {
			return err
		}
		block, err := meshConfig(&cfg, host, ca)
		if err != nil {
			return err
		}
		var b bytes.Buffer
		if instances > 0 {
			b.WriteString(shardAdvice(instances, len(block.ConfigSources)-1))
		}
		enc := yaml.NewEncoder(&b)
		enc.SetIndent(2)
		if err := enc.Encode(block); err != nil {
			return err
		}
		_, err = cmd.OutOrStdout().Write(b.Bytes())
		return err
	}
	return cmd
}

// meshBlock is the part of a mesh configuration that names config sources.
type meshBlock struct {
	ConfigSources []configSource `yaml:"configSources"`
	DefaultConfig struct {
		ProxyMetadata map[string]string `yaml:"proxyMetadata"`
	} `yaml:"defaultConfig"`
}

type configSource struct {
	Address string     `yaml:"address"`
	TLS     *sourceTLS `yaml:"tlsSettings,omitempty"`
}

type sourceTLS struct {
	Mode            string   `yaml:"mode"`
	SNI             string   `yaml:"sni,omitempty"`
	SubjectAltNames []string `yaml:"subjectAltNames,omitempty"`
	CA              string   `yaml:"caCertificates,omitempty"`
}

// meshConfig returns the block for a configuration.
func meshConfig(cfg *config.Config, host, ca string) (*meshBlock, error) {
	block := &meshBlock{ConfigSources: []configSource{{Address: "k8s://"}}}
	block.DefaultConfig.ProxyMetadata = map[string]string{"ISTIO_META_DNS_CAPTURE": "true"}
	listeners, err := sourceListeners(cfg)
	if err != nil {
		return nil, err
	}
	for _, l := range listeners {
		s, err := sourceOf(&l, host, ca)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", l.Path, err)
		}
		block.ConfigSources = append(block.ConfigSources, s)
	}
	return block, nil
}

// perShard is the number of instances that a shard should have at most, and
// mostShards how many shards are enough: what istiod spends on a change grows
// with its shard, and each shard is a stream of its own
// (docs/performance.md, "Shards of an istiod").
const perShard, mostShards = 6250, 64

// shardsFor returns the number of shards for a number of instances, a power of
// two, so that more shards later divide those that there are.
func shardsFor(instances int) int {
	n := 1
	for n < mostShards && instances > n*perShard {
		n *= 2
	}
	return n
}

// shardAdvice is a comment about the number of shards.
func shardAdvice(instances, sources int) string {
	want := shardsFor(instances)
	if want == 1 {
		return fmt.Sprintf("# %d instances want no shards.\n", instances)
	}
	advice := fmt.Sprintf("# %d instances want %d shards: a listener each, with view: {shard: 0/%d} and so on.\n", instances, want, want)
	if sources < want {
		advice += fmt.Sprintf("# The configuration gives istiod %d config source(s) besides k8s://.\n", sources)
	}
	return advice
}

// sourceListeners returns the listeners that are config sources: the first that
// istiod can dial and that serves everything, as one is enough, else all that
// istiod can dial, which share what is served.
func sourceListeners(cfg *config.Config) ([]config.NamedListener, error) {
	var parts []config.NamedListener
	for _, l := range cfg.Listen.All() {
		if l.Field != "listen.xds" || doctor.PortOf(l.Address) == "" {
			continue
		}
		if l.View.IsZero() {
			return []config.NamedListener{l}, nil
		}
		parts = append(parts, l)
	}
	if len(parts) > 0 {
		return parts, nil
	}
	return nil, errors.New("listen.xds: istiod dials no unix socket; add a listener with a port")
}

// sourceOf returns the config source of a listener.
func sourceOf(l *config.NamedListener, host, ca string) (configSource, error) {
	listens, port, err := net.SplitHostPort(l.Address)
	if err != nil {
		return configSource{}, err
	}
	if port == "0" {
		return configSource{}, errors.New("the port is any free one; give it a number for istiod to dial")
	}
	if host == "" {
		host = listens
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		return configSource{}, errors.New("it listens on all addresses: say with --host which name istiod dials, for example --host isthmus.isthmus-system.svc")
	}
	s := configSource{Address: "xds://" + net.JoinHostPort(host, port)}
	if !l.TLS.Enabled() {
		return s, nil
	}
	if l.TLS.ClientAuth == config.ClientAuthRequire {
		return s, errors.New("tls.client_auth: require refuses istiod, which presents no client certificate in any mode; write request")
	}
	if l.TLS.WorkloadAPI != "" {
		return s, errors.New("tls.workload_api: what istiod has to trust is known only once there is a certificate; use cert_file and key_file for a listener of istiod")
	}
	cert, err := doctor.ReadCertificate(l.TLS.CertFile)
	if err != nil {
		return s, fmt.Errorf("tls.cert_file: %w", err)
	}
	s.TLS = &sourceTLS{Mode: "SIMPLE", SubjectAltNames: cert.DNSNames}
	if len(cert.DNSNames) > 0 {
		s.TLS.SNI = cert.DNSNames[0]
	}
	if cert.VerifyHostname(host) == nil && net.ParseIP(host) == nil {
		s.TLS.SNI = host
	}
	if ca == "" && cert.IsCA {
		ca = l.TLS.CertFile
	}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return s, fmt.Errorf("--ca-file: %w", err)
		}
		s.TLS.CA = strings.TrimSpace(string(pem)) + "\n"
	}
	return s, nil
}
