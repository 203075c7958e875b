package access

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
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
	for _, f := range []string{k.cluster.CertificateAuthority, k.user.ClientCertificate, k.user.ClientKey} {
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
	c := api.Cluster{Server: address, CertificateAuthority: filepath.Join(dir, "ca.crt")}
	return (&kubeconfig{&c, &api.AuthInfo{TokenFile: filepath.Join(dir, "token")}}).server()
}

// kubeconfig is the part of a kubeconfig that its current context names.
type kubeconfig struct {
	cluster *api.Cluster
	user    *api.AuthInfo
}

// readKubeconfig reads a kubeconfig. Its paths are relative to its directory.
func readKubeconfig(file string) (*kubeconfig, error) {
	text, err := readFile(file)
	if err != nil {
		return nil, err
	}
	all, err := clientcmd.Load(text)
	if err != nil {
		// The error would repeat a part of the file, which holds secrets.
		return nil, fmt.Errorf("%s is not a kubeconfig", file)
	}
	k := new(kubeconfig)
	if of := all.Contexts[all.CurrentContext]; of != nil {
		k.cluster, k.user = all.Clusters[of.Cluster], all.AuthInfos[of.AuthInfo]
	}
	switch u := k.user; {
	case k.cluster == nil || u == nil:
		return nil, fmt.Errorf("%s: its current-context names no cluster and user that it has", file)
	case k.cluster.InsecureSkipTLSVerify:
		return nil, fmt.Errorf("%s: insecure-skip-tls-verify would give tokens to anyone who answers; name the certificate-authority", file)
	case k.cluster.ProxyURL != "" || u.Impersonate != "" || u.Username != "" || u.Exec != nil || u.AuthProvider != nil:
		return nil, fmt.Errorf("%s: exec, auth-provider, username, as and proxy-url are not supported; use a token, tokenFile or client-certificate", file)
	}
	k.cluster.LocationOfOrigin, k.user.LocationOfOrigin = file, file
	return k, clientcmd.ResolveLocalPaths(all)
}

// server reads the files of a kubeconfig.
func (k *kubeconfig) server() (*apiServer, error) {
	u, err := url.Parse(k.cluster.Server)
	if err != nil || u.Scheme != "https" || u.Host == "" {
		return nil, errors.New("the server of the cluster must be https://HOST")
	}
	s := &apiServer{url: strings.TrimSuffix(k.cluster.Server, "/"), token: k.user.Token}
	secure := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: k.cluster.TLSServerName}
	authorities, err := dataOr(k.cluster.CertificateAuthorityData, k.cluster.CertificateAuthority)
	if err != nil {
		return nil, fmt.Errorf("certificate-authority: %w", err)
	}
	if len(authorities) > 0 {
		secure.RootCAs = x509.NewCertPool()
		if !secure.RootCAs.AppendCertsFromPEM(authorities) {
			return nil, errors.New("certificate-authority holds no PEM certificate")
		}
	}
	cert, err := dataOr(k.user.ClientCertificateData, k.user.ClientCertificate)
	if err != nil {
		return nil, fmt.Errorf("client-certificate: %w", err)
	}
	key, err := dataOr(k.user.ClientKeyData, k.user.ClientKey)
	if err != nil {
		return nil, fmt.Errorf("client-key: %w", err)
	}
	if len(cert) > 0 || len(key) > 0 {
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

// dataOr returns data, or without it the content of a file, nil without either.
func dataOr(data []byte, file string) ([]byte, error) {
	if len(data) > 0 || file == "" {
		return data, nil
	}
	return readFile(file)
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
