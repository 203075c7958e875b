package kubernetes

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/transport"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// maxKubeconfig bounds the size of a kubeconfig, in bytes.
const maxKubeconfig = 1 << 20

// cluster is a server and a user.
type cluster struct {
	// config has the server, the user, and certificates that are not in files.
	config *rest.Config
	// tls names files, which are read for every connection.
	tls  plugin.TLS
	text []byte // of the kubeconfig, nil without one
	// exec is the program by which the user gets in, nil for none.
	exec *api.ExecConfig
}

// url returns the URL of the server.
func (k *cluster) url() *url.URL {
	u, err := url.Parse(k.config.Host)
	if err != nil {
		panic("BUG: a server that was not checked: " + err.Error())
	}
	return u
}

// tlsConfig returns the configuration of TLS, files read as they are now.
func (k *cluster) tlsConfig() (*tls.Config, error) {
	c, err := k.tls.Config("tls")
	if err != nil {
		return nil, err
	}
	data := k.config.TLSClientConfig
	if len(data.CAData) > 0 {
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(data.CAData) {
			return nil, errors.New("certificate-authority-data holds no PEM certificate")
		}
	}
	if len(data.CertData) > 0 {
		pair, err := tls.X509KeyPair(data.CertData, data.KeyData)
		if err != nil {
			return nil, fmt.Errorf("client-certificate-data and client-key-data: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	c.ServerName = cmp.Or(c.ServerName, k.url().Hostname())
	c.NextProtos = []string{"h2", "http/1.1"}
	return c, nil
}

// access returns what it takes of the machine to reach the server.
func (k *cluster) access() (a plugin.Access) {
	for _, file := range []string{k.config.BearerTokenFile, k.tls.CAFile, k.tls.CertFile, k.tls.KeyFile} {
		if file != "" {
			a.Read = append(a.Read, file)
		}
	}
	servers := []string{k.config.Host}
	if k.config.Proxy != nil {
		if proxy, err := k.config.Proxy(&http.Request{URL: k.url()}); err == nil && proxy != nil {
			servers = append(servers, proxy.String())
		}
	}
	a.Ports = plugin.URLPorts(servers)
	return a
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
		return nil, fmt.Errorf("%s is longer than %d KiB, which is too long for a kubeconfig", file, maxKubeconfig>>10)
	}
	k, err := parseKubeconfig(b, context, file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return k, nil
}

// parseKubeconfig is readKubeconfig for the content of a file. Relative paths
// are below the file's directory.
func parseKubeconfig(b []byte, context, file string) (*cluster, error) {
	all, err := clientcmd.Load(b)
	if err != nil {
		// The error may quote what is no YAML, and so a token.
		return nil, errors.New("it is not a kubeconfig: no YAML of the expected form")
	}
	for _, c := range all.Clusters {
		c.LocationOfOrigin = file
	}
	for _, u := range all.AuthInfos {
		u.LocationOfOrigin = file
	}
	if err := clientcmd.ResolveLocalPaths(all); err != nil {
		return nil, err
	}
	name := cmp.Or(context, all.CurrentContext)
	if name == "" {
		return nil, errors.New("it has no current-context; set context")
	}
	of := all.Contexts[name]
	if of == nil {
		return nil, fmt.Errorf("it has no context %q", name)
	}
	if err := checkContext(of, all); err != nil {
		return nil, err
	}
	config, err := clientcmd.NewNonInteractiveClientConfig(*all, name, &clientcmd.ConfigOverrides{}, nil).ClientConfig()
	if err != nil {
		return nil, err
	}
	if errs := checkServer("server", config.Host); len(errs) > 0 {
		return nil, fmt.Errorf("cluster %q: %w", of.Cluster, errors.Join(errs...))
	}
	k := &cluster{config: config, text: b, tls: plugin.TLS{
		CAFile: config.CAFile, CertFile: config.CertFile, KeyFile: config.KeyFile, ServerName: config.ServerName, InsecureSkipVerify: config.Insecure,
	}}
	k.exec, config.ExecProvider = config.ExecProvider, nil
	if len(config.CAData) > 0 {
		k.tls.CAFile = "" // the data wins, as for kubectl
	}
	if len(config.CertData) > 0 {
		k.tls.CertFile, k.tls.KeyFile = "", ""
	}
	return k, nil
}

// checkContext refuses what the library takes for something else, and users of
// kinds that need what the adapter does not have.
func checkContext(of *api.Context, all *api.Config) error {
	u := all.AuthInfos[of.AuthInfo]
	switch {
	case all.Clusters[of.Cluster] == nil:
		return fmt.Errorf("it has no cluster %q", of.Cluster)
	case u == nil:
		return fmt.Errorf("it has no user %q", of.AuthInfo)
	case u.AuthProvider != nil || u.Username != "":
		return fmt.Errorf("user %q gets in by an auth-provider or a password, which is not supported; make a service account, and set its token, or tokenFile", of.AuthInfo)
	case (len(u.ClientCertificateData) > 0) != (len(u.ClientKeyData) > 0):
		return errors.New("client-certificate-data and client-key-data go together")
	}
	return nil
}

// connect returns a client of the server, whose user gets in by l if it takes a
// program. A connection is made with the first request.
func (k *cluster) connect(timeout time.Duration, l *login) (*client, error) {
	if k.exec != nil {
		if l == nil || !l.fits(k.exec) {
			return nil, fmt.Errorf("the kubeconfig starts %s in another way than at the start of the plugin; restart it", k.exec.Command)
		}
		k.config.Wrap(transport.ResettableTokenSourceWrapTransport(transport.NewCachedTokenSource(l)))
	}
	c, err := newClient(k, timeout)
	if errors.Is(err, os.ErrNotExist) && k.config.BearerTokenFile == podFiles+"token" {
		err = fmt.Errorf("%w: outside of a cluster, set kubeconfig_file; in a pod, automountServiceAccountToken", err)
	}
	return c, err
}
