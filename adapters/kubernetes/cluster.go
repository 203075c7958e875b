package kubernetes

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"

	"go.yaml.in/yaml/v3"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// maxKubeconfig bounds the size of a kubeconfig, in bytes.
const maxKubeconfig = 1 << 20

// cluster is a server and a user.
type cluster struct {
	server    *url.URL
	token     string
	tokenFile string
	tls       plugin.TLS
	// PEM in place of the files of tls; nil if there is none.
	ca, cert, key []byte
}

// bearer returns the token, or "" for none.
func (k *cluster) bearer() (string, error) {
	if k.tokenFile != "" {
		token, err := plugin.ReadSecret(k.tokenFile)
		if errors.Is(err, os.ErrNotExist) && k.tokenFile == podFiles+"token" {
			err = fmt.Errorf("%w: outside of a cluster, set kubeconfig_file; in a pod, automountServiceAccountToken", err)
		}
		return token, err
	}
	return k.token, nil
}

// config returns the configuration of TLS, files read as they are now.
func (k *cluster) config() (*tls.Config, error) {
	c, err := k.tls.Config("tls")
	if err != nil {
		return nil, err
	}
	if k.ca != nil {
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(k.ca) {
			return nil, errors.New("certificate-authority-data holds no PEM certificate")
		}
	}
	if k.cert != nil || k.key != nil {
		pair, err := tls.X509KeyPair(k.cert, k.key)
		if err != nil {
			return nil, fmt.Errorf("client-certificate-data and client-key-data: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	c.ServerName = cmp.Or(c.ServerName, k.server.Hostname())
	c.NextProtos = []string{"h2", "http/1.1"}
	return c, nil
}

// files returns the files that are read again.
func (k *cluster) files() (all []string) {
	for _, file := range []string{k.tokenFile, k.tls.CAFile, k.tls.CertFile, k.tls.KeyFile} {
		if file != "" {
			all = append(all, file)
		}
	}
	return all
}

// kubeconfig is what is read of a kubeconfig.
type kubeconfig struct {
	Current  string `yaml:"current-context"`
	Contexts []struct {
		Name    string
		Context struct{ Cluster, User string }
	}
	Clusters []struct {
		Name    string
		Cluster struct {
			Server     string
			CA         string `yaml:"certificate-authority"`
			CAData     binary `yaml:"certificate-authority-data"`
			Insecure   bool   `yaml:"insecure-skip-tls-verify"`
			ServerName string `yaml:"tls-server-name"`
			Proxy      string `yaml:"proxy-url"`
		}
	}
	Users []struct {
		Name string
		User struct {
			Token     string
			TokenFile string `yaml:"tokenFile"`
			Cert      string `yaml:"client-certificate"`
			CertData  binary `yaml:"client-certificate-data"`
			Key       string `yaml:"client-key"`
			KeyData   binary `yaml:"client-key-data"`
			Exec      any
			Provider  any `yaml:"auth-provider"`
			Username  string
		}
	}
}

// readKubeconfig reads a context of a kubeconfig, "" for its current one.
func readKubeconfig(file, context string) (*cluster, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxKubeconfig+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxKubeconfig {
		return nil, fmt.Errorf("%s is longer than %d KiB, which is no kubeconfig", file, maxKubeconfig>>10)
	}
	k, err := parseKubeconfig(b, context, filepath.Dir(file))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return k, nil
}

// parseKubeconfig is readKubeconfig for its content. Relative paths are below
// dir.
func parseKubeconfig(b []byte, context, dir string) (*cluster, error) {
	var c kubeconfig
	if err := yaml.Unmarshal(b, &c); err != nil {
		// The error may quote what is no YAML, and so a token.
		return nil, errors.New("it is no kubeconfig: no YAML of the expected form")
	}
	name := cmp.Or(context, c.Current)
	if name == "" {
		return nil, errors.New("it has no current-context; set context")
	}
	var clusterName, userName string
	found := false
	for _, x := range c.Contexts {
		if x.Name == name {
			found, clusterName, userName = true, x.Context.Cluster, x.Context.User
		}
	}
	if !found {
		return nil, fmt.Errorf("it has no context %q", name)
	}
	k := &cluster{}
	under := func(path string) string {
		if path == "" || filepath.IsAbs(path) {
			return path
		}
		return filepath.Join(dir, path)
	}
	for _, x := range c.Clusters {
		if x.Name != clusterName {
			continue
		}
		if errs := checkServer("server", x.Cluster.Server); len(errs) > 0 {
			return nil, fmt.Errorf("cluster %q: %w", x.Name, errors.Join(errs...))
		}
		if x.Cluster.Proxy != "" {
			return nil, fmt.Errorf("cluster %q: proxy-url is not supported; reach the server without a proxy", x.Name)
		}
		k.server, _ = url.Parse(x.Cluster.Server) // checked above
		k.tls.CAFile, k.ca = under(x.Cluster.CA), x.Cluster.CAData
		k.tls.ServerName, k.tls.InsecureSkipVerify = x.Cluster.ServerName, x.Cluster.Insecure
	}
	if k.server == nil {
		return nil, fmt.Errorf("it has no cluster %q, which context %q names", clusterName, name)
	}
	for _, x := range c.Users {
		if x.Name != userName {
			continue
		}
		u := x.User
		if u.Exec != nil || u.Provider != nil || u.Username != "" {
			return nil, fmt.Errorf("user %q gets in by a program (exec), an auth-provider or a password, which is not supported; make a service account, and set its token, or tokenFile", x.Name)
		}
		k.token, k.tokenFile = u.Token, under(u.TokenFile)
		k.tls.CertFile, k.tls.KeyFile, k.cert, k.key = under(u.Cert), under(u.Key), u.CertData, u.KeyData
		userName = ""
	}
	if userName != "" {
		return nil, fmt.Errorf("it has no user %q, which context %q names", userName, name)
	}
	if k.ca != nil {
		k.tls.CAFile = "" // the data wins, as for kubectl
	}
	if k.cert != nil {
		k.tls.CertFile, k.tls.KeyFile = "", ""
	}
	if k.cert != nil && k.key == nil || k.cert == nil && k.key != nil {
		return nil, errors.New("client-certificate-data and client-key-data go together")
	}
	if errs := k.tls.Check("tls"); len(errs) > 0 {
		return nil, errors.New("client-certificate and client-key go together")
	}
	return k, nil
}

// binary is text in base64.
type binary []byte

// UnmarshalYAML implements yaml.Unmarshaler.
func (b *binary) UnmarshalYAML(n *yaml.Node) error {
	var text string
	if err := n.Decode(&text); err != nil || text == "" {
		return err
	}
	raw, err := decodeBase64(text)
	if err != nil {
		return err
	}
	*b = raw
	return nil
}
