package access

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// podDir is where a pod finds the token of its service account.
const podDir = "/var/run/secrets/kubernetes.io/serviceaccount"

// apiServer is the API server of Kubernetes and how it is reached.
type apiServer struct {
	url       string
	client    *http.Client
	token     string
	tokenFile *watched[string] // nil without one
}

// apiServerFiles returns what an API server is read from: a kubeconfig, or in a
// pod what is mounted there. The files are those that the kubeconfig names now.
func apiServerFiles(kubeconfig string) (files []string, read func([]string) (*apiServer, error), err error) {
	if kubeconfig == "" {
		address, err := podAddress(os.Getenv)
		return []string{filepath.Join(podDir, "ca.crt")}, func([]string) (*apiServer, error) { return inPod(podDir, address) }, err
	}
	k, err := readKubeconfig(kubeconfig)
	if err != nil {
		return nil, nil, err
	}
	files = []string{kubeconfig}
	for _, f := range []string{k.cluster.CAFile, k.user.CertFile, k.user.KeyFile} {
		if f != "" {
			files = append(files, f)
		}
	}
	return files, func([]string) (*apiServer, error) {
		k, err := readKubeconfig(kubeconfig)
		if err != nil {
			return nil, err
		}
		return k.server()
	}, nil
}

// podAddress returns the address of the API server in a pod.
func podAddress(getenv func(string) string) (string, error) {
	host, port := getenv("KUBERNETES_SERVICE_HOST"), getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return "", errors.New("is missing, and the bridge is in no pod of Kubernetes (KUBERNETES_SERVICE_HOST is not set)")
	}
	return "https://" + net.JoinHostPort(host, port), nil
}

// inPod returns the API server that a pod with these mounted files uses.
func inPod(dir, address string) (*apiServer, error) {
	c := kubeCluster{Server: address, CAFile: filepath.Join(dir, "ca.crt")}
	return (&kubeconfig{cluster: c, user: kubeUser{TokenFile: filepath.Join(dir, "token")}}).server()
}

// kubeconfig is the part of a kubeconfig that its current context names.
type kubeconfig struct {
	cluster kubeCluster
	user    kubeUser
}

type kubeCluster struct {
	Server     string `yaml:"server"`
	CAFile     string `yaml:"certificate-authority"`
	CA         string `yaml:"certificate-authority-data"`
	ServerName string `yaml:"tls-server-name"`
	Insecure   bool   `yaml:"insecure-skip-tls-verify"`
	Proxy      string `yaml:"proxy-url"`
}

type kubeUser struct {
	Token     string `yaml:"token"`
	TokenFile string `yaml:"tokenFile"`
	CertFile  string `yaml:"client-certificate"`
	Cert      string `yaml:"client-certificate-data"`
	KeyFile   string `yaml:"client-key"`
	Key       string `yaml:"client-key-data"`
	Exec      any    `yaml:"exec"`
	Provider  any    `yaml:"auth-provider"`
	Username  string `yaml:"username"`
	As        string `yaml:"as"`
}

// readKubeconfig reads a kubeconfig. Its paths are relative to its directory.
func readKubeconfig(file string) (*kubeconfig, error) {
	text, err := readFile(file)
	if err != nil {
		return nil, err
	}
	var all struct {
		Current  string `yaml:"current-context"`
		Contexts []struct {
			Name    string `yaml:"name"`
			Context struct {
				Cluster string `yaml:"cluster"`
				User    string `yaml:"user"`
			} `yaml:"context"`
		} `yaml:"contexts"`
		Clusters []struct {
			Name    string      `yaml:"name"`
			Cluster kubeCluster `yaml:"cluster"`
		} `yaml:"clusters"`
		Users []struct {
			Name string   `yaml:"name"`
			User kubeUser `yaml:"user"`
		} `yaml:"users"`
	}
	if yaml.Unmarshal(text, &all) != nil {
		// The error would repeat a part of the file, which holds secrets.
		return nil, fmt.Errorf("%s is no kubeconfig", file)
	}
	k, found := new(kubeconfig), 0
	for _, c := range all.Contexts {
		if c.Name != all.Current {
			continue
		}
		for _, x := range all.Clusters {
			if x.Name == c.Context.Cluster {
				k.cluster, found = x.Cluster, found|1
			}
		}
		for _, x := range all.Users {
			if x.Name == c.Context.User {
				k.user, found = x.User, found|2
			}
		}
	}
	switch u := &k.user; {
	case found != 3:
		return nil, fmt.Errorf("%s: its current-context names no cluster and user that it has", file)
	case k.cluster.Insecure:
		return nil, fmt.Errorf("%s: insecure-skip-tls-verify would give tokens to whoever answers; name the certificate-authority", file)
	case k.cluster.Proxy != "" || u.As != "" || u.Username != "" || u.Exec != nil || u.Provider != nil:
		return nil, fmt.Errorf("%s: exec, auth-provider, username, as and proxy-url are not supported; use a token, tokenFile or client-certificate", file)
	}
	for _, f := range []*string{&k.cluster.CAFile, &k.user.TokenFile, &k.user.CertFile, &k.user.KeyFile} {
		if *f != "" && !filepath.IsAbs(*f) {
			*f = filepath.Join(filepath.Dir(file), *f)
		}
	}
	return k, nil
}

// server reads the files of a kubeconfig.
func (k *kubeconfig) server() (*apiServer, error) {
	u, err := url.Parse(k.cluster.Server)
	if err != nil || u.Scheme != "https" || u.Host == "" {
		return nil, errors.New("the server of the cluster must be https://HOST")
	}
	s := &apiServer{url: strings.TrimSuffix(k.cluster.Server, "/"), token: k.user.Token}
	secure := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: k.cluster.ServerName}
	authorities, err := dataOr(k.cluster.CA, k.cluster.CAFile)
	if err != nil {
		return nil, fmt.Errorf("certificate-authority: %w", err)
	}
	if authorities != nil {
		secure.RootCAs = x509.NewCertPool()
		if !secure.RootCAs.AppendCertsFromPEM(authorities) {
			return nil, errors.New("certificate-authority holds no PEM certificate")
		}
	}
	cert, err := dataOr(k.user.Cert, k.user.CertFile)
	if err != nil {
		return nil, fmt.Errorf("client-certificate: %w", err)
	}
	key, err := dataOr(k.user.Key, k.user.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("client-key: %w", err)
	}
	if cert != nil || key != nil {
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("client-certificate: %w", err)
		}
		secure.Certificates = []tls.Certificate{pair}
	}
	if k.user.TokenFile != "" {
		if s.tokenFile, err = watch([]string{k.user.TokenFile}, readToken); err != nil {
			return nil, err
		}
	}
	s.client = &http.Client{
		Transport: &http.Transport{
			TLSClientConfig: secure, Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true,
			MaxConnsPerHost: reviewsAtOnce, IdleConnTimeout: time.Minute,
		},
		// A redirect would carry a token elsewhere.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return s, nil
}

// dataOr returns data, which is in base64, or without it the content of a file,
// nil without either.
func dataOr(data, file string) ([]byte, error) {
	switch {
	case data != "":
		b, err := base64.StdEncoding.DecodeString(data)
		if err != nil {
			return nil, errors.New("is no base64")
		}
		return b, nil
	case file != "":
		return readFile(file)
	}
	return nil, nil
}

// readToken reads a file that holds a token.
func readToken(files []string) (string, error) {
	b, err := readFile(files[0])
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(b))
	if token == "" || strings.ContainsAny(token, "\r\n") {
		return "", fmt.Errorf("%s holds no token", files[0])
	}
	return token, nil
}
